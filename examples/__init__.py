"""Programs that use cupaged; not part of the installed package."""
