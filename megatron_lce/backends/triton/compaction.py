compact_rows = gather_rows = None
