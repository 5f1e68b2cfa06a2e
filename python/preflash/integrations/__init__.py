"""preflash inside other libraries. Each module imports its library when it is imported itself."""
