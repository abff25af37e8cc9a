"""The library that the recipes in data_gen/, train/, export/ and eval/ are written in."""
