"""Results and decisions as tables, plots and one report."""
