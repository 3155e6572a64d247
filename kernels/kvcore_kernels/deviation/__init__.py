"""How far cached K and V are from computed ones: squared distance per row."""
