"""What every stage will take, before it is started; above all stages, and imported by scripts only."""
