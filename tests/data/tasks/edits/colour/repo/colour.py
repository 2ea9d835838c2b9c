GRASS = "gren"
SKY = "blue"


def colour(thing):
    return {"grass": GRASS, "sky": SKY}[thing]
