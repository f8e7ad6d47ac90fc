"""From files of rows to batches, in this order:

rows      opens files, folders and data sets of the Hub; reads a row by its index
formats   which format a row is in, and what it says
images    the images of a row
examples  a row as tokens and labels; batches of examples as tensors
batches   the order of the rows, the examples that go together, and the data of a run
workers   runs this ahead of the steps, in a thread or in processes
"""
