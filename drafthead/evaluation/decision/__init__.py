"""From results to a decision: verdict, schedules of draft lengths, and how to serve."""
