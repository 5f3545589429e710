"""Independent implementations that tests compare fxaudit with. Nothing here imports fxaudit."""
