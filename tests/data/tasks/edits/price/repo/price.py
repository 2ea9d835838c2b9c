def price():
    return 191
