"""Which devices a program is planned for: their rates, their memory, and what their compiler does."""
