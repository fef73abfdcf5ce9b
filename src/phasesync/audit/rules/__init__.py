"""The rules of the audit, one family a file, each rule one small object fed by one pass."""
