"""The table of arms, servers of both engines that run them, and the clients that measure these."""
