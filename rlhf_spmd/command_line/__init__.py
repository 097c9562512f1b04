"""What several verbs share: reading their words, checking, planning and writing."""
