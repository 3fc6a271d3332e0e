"""What YAML files may say."""
