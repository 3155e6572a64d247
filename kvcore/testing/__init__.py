"""The public test kit: contracts, conformance, faults and the reference engine."""
