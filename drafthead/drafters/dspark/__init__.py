"""DSpark: DFlash's block, with a bias on every draft from the token before it."""
