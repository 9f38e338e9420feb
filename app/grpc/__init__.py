"""The gRPC interface, beside the HTTP one and over the same service: `manta.proto` says what it offers.

Its modules `manta_pb2` and `manta_pb2_grpc` are made from that file:

    .venv/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. app/grpc/manta.proto
"""
