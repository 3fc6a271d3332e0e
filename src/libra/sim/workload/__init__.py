"""What asks engines for work: recorded, replayed or made from distributions."""
