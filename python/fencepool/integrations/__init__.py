"""fencepool where its users are: one module for each program or library, none of them imported by default."""
