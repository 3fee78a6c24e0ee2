#![no_main]

forebay_fuzz::targets! {
    "readcache_metadata" => forebay_readcache::fuzz::decode,
    "readcache_sealed" => forebay_readcache::fuzz::decode_sealed,
}
