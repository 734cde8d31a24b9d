"""The papers' tables: what they say, what comes out here, and the difference."""
