"""Tables of words, written as they are read: a row a line, cells between bars."""


def tabulated(text):
    return [tuple(cell.strip() for cell in line.split("|")) for line in text.strip().splitlines()]
