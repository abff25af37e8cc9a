"""Heads made elsewhere, brought into the form of a checkpoint of this project."""
