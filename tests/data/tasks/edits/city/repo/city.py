def city():
    return "Pariss"
