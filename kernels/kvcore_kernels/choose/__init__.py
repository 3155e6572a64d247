"""The rows of highest score, sorted by position, chosen without leaving the device."""
