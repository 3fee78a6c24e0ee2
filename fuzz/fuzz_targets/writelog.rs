#![no_main]

forebay_fuzz::targets! {
    "writelog_format" => forebay_writelog::fuzz::decode,
    "writelog_sealed" => forebay_writelog::fuzz::decode_sealed,
    "writelog_messages" => forebay_writelog::fuzz::decode_messages,
}
