"""What the demonstration embeds: some pairs say nearly the same in other words."""

SENTENCES = (
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping by the sunny window.",
    "The bakery opens at six in the morning.",
    "You can buy fresh bread there from 6 a.m.",
    "Our train was delayed because of heavy snow.",
    "Bad winter weather made the railway run late.",
    "The graphics card has run out of memory.",
    "There is no space left on the GPU.",
    "She is learning to play the violin.",
    "He repaired the bicycle's flat tyre.",
    "The lake is frozen from December to March.",
    "Interest rates rose for the third time this year.",
)
