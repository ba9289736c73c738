"""What the trainers' integrations share: attempts at rows, figures of them, rows by weight. Knows no trainer."""
