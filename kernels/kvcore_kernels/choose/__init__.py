"""The rows with the highest scores, sorted by position and chosen on the device."""
