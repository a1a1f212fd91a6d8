"""Which devices a program is planned for, and what communication and work cost there: published and measured rates."""
