"""Empty: imported as a module, used only by image processors."""
