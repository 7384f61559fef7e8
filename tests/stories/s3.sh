# A folder in an S3 bucket, packed by one job and read by another on other nodes. The bucket is empty by then.
export AWS_ENDPOINT_URL=http://ctl:5000 AWS_ACCESS_KEY_ID=nobody AWS_SECRET_ACCESS_KEY=nothing AWS_DEFAULT_REGION=us-east-1
deeplink demo --write-digits digits
python -c 'import fsspec
s3 = fsspec.filesystem("s3")
s3.mkdir("bucket")
s3.put("digits/", "bucket/digits/", recursive=True)'
salloc -N1 -w n0 --exclusive deeplink pack s3://bucket/digits digits
python -c 'import fsspec; fsspec.filesystem("s3").rm("bucket/digits", recursive=True)'
salloc -N2 -w n1,n2 --exclusive deeplink run --nproc-per-node 1 -- python epochs.py digits 3
