MONTHS = ["January", "Febuary", "March"]


def month(number):
    return MONTHS[number - 1]
