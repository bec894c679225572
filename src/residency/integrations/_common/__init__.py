"""What the integrations of several frameworks use."""
