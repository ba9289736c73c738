"""What everything stands on: errors, configs, JSON, the HTTP client, files, and what is started once and shared."""
