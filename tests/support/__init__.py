"""What the behavioural tests share: the machine below the pools, policies, contents, child processes."""
