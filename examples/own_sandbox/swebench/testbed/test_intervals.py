import unittest

from intervals import merge


class MergeTest(unittest.TestCase):
    def test_overlapping(self):
        self.assertEqual(merge([(1, 4), (2, 6)]), [(1, 6)])

    def test_touching(self):
        self.assertEqual(merge([(1, 2), (2, 3)]), [(1, 3)])

    def test_unsorted(self):
        self.assertEqual(merge([(8, 9), (1, 3)]), [(1, 3), (8, 9)])

    def test_one_inside_another(self):
        self.assertEqual(merge([(1, 9), (2, 3)]), [(1, 9)])


if __name__ == "__main__":
    unittest.main()
