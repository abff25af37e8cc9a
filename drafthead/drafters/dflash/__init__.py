"""DFlash: a block of draft positions filled in one pass over the target's states."""
