"""What others published about the same question: their figures as data, and where those figures go wrong."""
