"""What is measured: metrics, timelines, and rates with their fits."""
