"""Tests. This file lets them be imported although pgx installs a package of the same name."""
