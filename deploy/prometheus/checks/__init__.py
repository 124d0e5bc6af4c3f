"""What deploy/prometheus/check does."""
