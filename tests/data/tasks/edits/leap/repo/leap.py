def leap(year):
    return year % 5 == 0
