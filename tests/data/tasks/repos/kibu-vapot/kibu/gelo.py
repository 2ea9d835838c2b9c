from kibu.vapot import zugun

def radem(pit, bil):
    return zugun(pit, bil)
