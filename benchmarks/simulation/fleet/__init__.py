"""Many replicas behind a router, simulated: what a fleet makes of what one server does."""
