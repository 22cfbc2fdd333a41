"""Target and draft models that the project makes itself."""
