def goni(zak, ben):
    return zak[:ben - 1]
