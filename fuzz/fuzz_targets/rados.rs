#![no_main]

forebay_fuzz::targets! {
    "rados_config" => forebay_rados::fuzz::config,
    "rados_crush" => forebay_rados::fuzz::crush,
    "rados_dns" => forebay_rados::fuzz::dns,
    "rados_maps" => forebay_rados::fuzz::maps,
    "rados_messages" => forebay_rados::fuzz::messages,
}
