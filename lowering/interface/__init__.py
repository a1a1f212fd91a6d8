"""What partitioning is asked, and what it answers: the policy, the setting of a program, the report."""
