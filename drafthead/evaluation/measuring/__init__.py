"""What a measurement does: acceptance in process, speed under load, their plans and presets."""
