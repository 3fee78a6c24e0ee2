#![no_main]

forebay_fuzz::targets! {
    "vhost_inflight" => forebay_vhost::fuzz::inflight,
    "vhost_packed_ring" => forebay_vhost::fuzz::packed_ring,
    "vhost_split_ring" => forebay_vhost::fuzz::split_ring,
}
