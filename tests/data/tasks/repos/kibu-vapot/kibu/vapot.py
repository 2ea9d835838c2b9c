def tupal(mel):
    return mel * 3

def zugun(pit, bil):
    return pit == bil
