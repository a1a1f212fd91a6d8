"""What users demand of plans: budgets, and axes along which nothing moves unasked."""
