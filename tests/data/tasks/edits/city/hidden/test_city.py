import unittest

from city import city


class TestCity(unittest.TestCase):
    def test_city(self):
        self.assertEqual(city(), "Paris")
